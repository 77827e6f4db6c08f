"""ZB-H2: enough microbatches in flight that no worker ever waits between its first and last action."""

from .zb_h1 import ZBH1


class ZBH2(ZBH1):
    """ZB-H2: ZB-H1 with about twice the microbatches in flight; no bubble from step to step.

        worker 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3 ..
        worker 1  .. F0 F1 F2 F3 .. I0 .. I1 .. I2 W0 I3 W1 W2 W3
        worker 2  .. .. F0 F1 F2 I0 F3 I1 .. I2 .. I3 W0 W1 W2 W3
        worker 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3 ..

    It is made for as many microbatches as it can hold. The span is from a worker's first action to its last. It is also
    a step's time, as a step begins on a stage when that stage has been updated.

        span = M * (t_F + t_I + t_W) + (P - 1) * max(0, t_F + t_I - 2 * t_W) if M >= 2 * P - 1
        activations = min(M, 2 * P - 1)
    """

    source = "Qi et al. 2023, Zero Bubble, arXiv:2401.10241, section 2.3"
    post_validation = True

    def ahead(self, stage: int) -> int:
        return 2 * (self.last_stage - stage)

    def lag(self, stage: int) -> int:
        return 2 * stage
