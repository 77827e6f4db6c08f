from rpc_pipe.dependency import B, Spec, U


class UpdateAlways(Spec):
    """An update after every microbatch; a subclass says how far forwards run ahead."""

    synchronous = False

    def updates(self, stage, route):
        return (U(stage, m) for m in range(self.num_microbatches))

    def after(self, a):
        return [B(a.stage, a.microbatch), U(a.stage, a.microbatch - 1)] if a.kind is U else []
