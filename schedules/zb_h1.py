"""ZB-H1: weights' gradients fill the bubble of 1F1B, within the memory of its first stage."""

from ..dependency import Action, F, I, Spec, W


class ZBH1(Spec):
    """ZB-H1: backward is split; W waits while I of later microbatches is more urgent. A third of 1F1B's bubble.

        worker 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3
        worker 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3
        worker 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
        worker 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

    On stage s, W stays s microbatches behind I.

        makespan = M * (t_F + t_I + t_W) + (P - 1) * (t_F + max(0, t_I - t_W)) if M >= P
        activations = min(M, P)
    """

    source = "Qi et al. 2023, Zero Bubble, arXiv:2401.10241, section 2.3; order as torch's ZB1P"
    split_backward = True

    def ahead(self, stage: int) -> int:
        """Return how many forwards a stage runs before its first backward, less one."""
        return self.last_stage - stage

    def lag(self, stage: int) -> int:
        """Return how many microbatches W stays behind I."""
        return stage

    def after(self, a: Action) -> list[Action]:
        s, m = a.stage, a.microbatch
        if a.kind is F:
            return [I(s, m - self.ahead(s) - 1), W(s, m - self.ahead(0) - 1)]
        if a.kind is W:
            return [I(s, min(m + self.lag(s), self.num_microbatches - 1))]
        return []

    def slot(self, a: Action) -> int:
        s, m = a.stage, a.microbatch
        if a.kind is F and m < self.ahead(s):
            return s + m
        j = {F: m - self.ahead(s), I: m, W: m + self.lag(s)}[a.kind]
        beside = {F: -1, I: 0, W: 1}[a.kind]
        return 2 * self.num_stages - 1 - s + 2 * j + max(0, j - self.lag(s)) + beside

    def peak_activations(self, worker: int) -> int:
        return min(self.num_microbatches, self.ahead(0) + 1)
