"""The user's call on a worker, compared with the peers' calls: workers make the same call or stop. Loads without torch.

A call travels with the first questions of every run and needs no answer: its receiver compares it with the local call
of that number and, if they differ, answers with the difference alone. So no run uses payloads of another call.
"""

from typing import NamedTuple

from ...dependency import Malformed

_CALL = "call "
_FIELDS = "\x1f"
#: between the parts of a description
PARTS = "\x1e"
#: marks a stage with the digest of weights that its forwards write
WRITTEN = "*"
#: and one with the digest and the name of a buffer that its forwards write
BUFFER = "~"


class Call(NamedTuple):
    """One call of the pipeline on one worker. A field is empty where there is nothing to compare."""

    worker: int
    #: such as `step 3`, `evaluate` or `gather state`
    what: str
    #: the pipeline that was called
    pipeline: str = ""
    #: form and digests of the arguments, from `compute.modules.digest.describe`
    inputs: str = ""
    targets: str = ""
    #: digests of the initial weights of stages that several workers hold, such as `0=5f3a 3=77bb`, or of written ones
    weights: str = ""
    #: the run that rests while this call is made: the step that `train` has begun where the body of its loop is
    within: str = ""
    #: numbers of the microbatches in the order in which they run, if it is not the order given
    order: str = ""

    def told(self) -> str:
        """Return this, less the worker, as the name of a question that asks for nothing."""
        # Half of a pair of UTF-16, as in names of files, is no text of a message.
        return _CALL + _FIELDS.join(self[1:]).encode(errors="backslashreplace").decode()


def parse(peer: int, told: str) -> Call:
    """Return the call in a message of `peer`.

    Raises:
        Malformed: there is none.
    """
    fields = told.removeprefix(_CALL).split(_FIELDS)
    if len(fields) != len(Call._fields) - 1 or any(pair.count("=") != 1 for pair in fields[4].split()):
        raise Malformed(f"malformed message: worker {peer} told no call")
    return Call(peer, *fields)


def is_call(what: str) -> bool:
    """Return whether a question was made by `Call.told`."""
    return what.startswith(_CALL)
