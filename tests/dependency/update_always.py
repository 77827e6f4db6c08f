from rpc_pipe.dependency import Spec


class UpdateAlways(Spec):
    """An update after every microbatch; a subclass says how far forwards run ahead."""

    synchronous = False
    update_every = "microbatch"

    def version(self, stage, microbatch):
        return max(0, microbatch + 1 - (self.num_stages - stage))
