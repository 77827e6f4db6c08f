"""All kinds of faults that `tests/trials/faults.py` inflicts, and what must be said of each."""

from __future__ import annotations

import signal
from typing import NamedTuple

#: by place of the user's code, what a worker is said to do there
_DOING = {
    "forward": r"running @F\d", "backward": r"running @B\d", "loss": r"running @F\d", "metric": r"running @F\d",
    "optimizer": r"running @U0", "scheduler": r"running @U0", "script": "", "data": "", "build": "starting up",
    "start-up": "starting up",
}  # fmt: skip
_OUTSIDE = ("script", "data", "build", "start-up")  # of the pipeline's own calls
_ALL = tuple(_DOING)
_BY_SIGNAL = r"worker @ was killed by signal {0} \({1}\) while "
#: by fault, where it happens, and what the block must say; @: the worker, DOING: as above, FAILED: that it raised there
_FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "exception": (_ALL, "FAILED.*ArithmeticError"),
    "long text": (("forward", "script"), "FAILED.*ArithmeticError"),
    "unkind": (("forward", "loss", "script"), "FAILED.*Unkind"),
    "KeyboardInterrupt": (("forward", "backward", "optimizer", *_OUTSIDE), "FAILED.*KeyboardInterrupt"),
    "GeneratorExit": (("forward", "script"), "FAILED.*GeneratorExit"),
    "CancelledError": (("forward", "script"), "FAILED.*CancelledError"),
    "StopIteration": (("forward", "loss", "optimizer", "metric"), "FAILED.*StopIteration"),
    "recursion": (("forward", "loss"), "FAILED.*RecursionError"),
    "out of memory": (("forward", "optimizer"), "FAILED.*RuntimeError.*(memory|size)"),
    "memory used up": (("forward", "optimizer"), "FAILED.*(RuntimeError|MemoryError)"),
    "MemoryError": (("forward", "script"), "FAILED.*MemoryError"),
    "no descriptors": (("forward", "script"), "FAILED.*OSError.*Too many open files"),
    "disk full": (("forward", "script"), "FAILED.*OSError.*File too large"),
    "full later": (("script",), "checkpoint .*cannot be written.*File too large.*goes on without it"),
    "sys.exit": (("forward", "backward", "optimizer", *_OUTSIDE), "FAILED.*SystemExit"),
    "os._exit": (("forward", "backward", "optimizer", "script", "data", "build"), "exit code 0 while DOING"),
    "nan": (("forward",), "the loss is nan"),
    "hang": (("forward", "backward", "loss", "optimizer", *_OUTSIDE), "HANGS"),
    "endless loop": (("forward", "script"), "HANGS"),
    "hang in C": (("forward", "loss", "script"), "HANGS"),
    "prints": (("forward", "script"), "HANGS"),
    "stop": (("forward", "script"), "worker @ was stopped by a signal"),
    "segfault": (("forward", "backward"), f"{_BY_SIGNAL.format(11, 'SIGSEGV')}DOING"),
    "abort": (("forward",), f"{_BY_SIGNAL.format(6, 'SIGABRT')}DOING"),
    "bus error": (("forward",), f"{_BY_SIGNAL.format(7, 'SIGBUS')}DOING"),
    "illegal": (("forward",), f"{_BY_SIGNAL.format(4, 'SIGILL')}DOING"),
    "kill": (("forward", "backward", "optimizer", *_OUTSIDE), f"{_BY_SIGNAL.format(9, 'SIGKILL')}DOING"),
    "forked, killed": (("forward",), f"{_BY_SIGNAL.format(9, 'SIGKILL')}DOING"),
    "closed descriptors": (("forward",), r"worker @ (was killed|ended|failed)|lost worker @"),
    "lost connections": (("forward", "script"), r"lost worker \d|worker \d .*(connection|closed|EOF|pipe)"),
    "closed output": (("forward", "script"), "FAILED.*OSError.*Bad file descriptor"),
    "exit": (("start-up",), "worker @ has ended without a Pipeline"),
}
FROM_OUTSIDE = {
    "killed from outside": signal.SIGKILL,
    "terminated from outside": signal.SIGTERM,
    "hung up from outside": signal.SIGHUP,
    "stopped from outside": signal.SIGSTOP,
    "interrupted from outside": signal.SIGINT,
}
TO_LAUNCHER = {
    "launcher killed": signal.SIGKILL,
    "worker stopped, launcher killed": signal.SIGKILL,
    "launcher interrupted": signal.SIGINT,
    "launcher interrupted twice": signal.SIGINT,
    "launcher terminated": signal.SIGTERM,
    "launcher hung up": signal.SIGHUP,
    "launcher interrupted early": signal.SIGINT,
    "launcher terminated early": signal.SIGTERM,
    "one prints, launcher interrupted twice": signal.SIGINT,
    "one prints, launcher terminated": signal.SIGTERM,
}
#: what is done to what the launcher needs
AROUND = ("nobody reads", "output is full", "shared memory is full")
#: what is done to a port that workers open to everybody: over RPC alone
STRANGERS = ("stranger",)
#: where nobody of ours sees how a process ended: what the others know of it, or torchrun's table
_ENDED = r"lost worker @|worker @ has ended its script|heard of workers \[@\]|Root Cause.*rank +: @ .*exitcode +: -?\d+"
#: under torchrun alone: an agent and all its workers are killed at once
NODE = "node dies"
#: where a fault happens after a few calls, not after many
_RARE = ("optimizer", "scheduler", "script", "data")


class Kind(NamedTuple):
    """A kind of fault: what happens, and where in the user's code."""

    fault: str
    place: str

    @property
    def first_call(self) -> tuple[int, int]:
        """The calls of that place by which the fault happens: from one to before another."""
        if self.place in ("build", "start-up"):
            return 1, 2
        return (2, 9) if self.place in _RARE else (5, 40)


def kind_of(what: str) -> Kind:
    """Return a kind by its name."""
    if what.startswith("one prints"):
        return Kind("prints", "script")
    fault, _, place = what.partition(" in ")
    if place not in _DOING:  # "hang in C in forward"
        inner, _, place = place.partition(" in ")
        fault = f"{fault} in {inner}"
    return Kind(fault, place if place in _DOING else "")


def kinds(transport: str, *, torchrun: bool = False) -> list[str]:
    """Return the names of all kinds of faults."""
    own = [f"{fault} in {place}" for fault, (places, _) in _FAULTS.items() for place in places]
    if torchrun:  # where there is no launcher of ours
        return [what for what in own if not what.startswith("full later")] + ["killed from outside", NODE]
    return [*own, *FROM_OUTSIDE, *TO_LAUNCHER, *AROUND, *(STRANGERS if transport == "rpc" else ())]


def survives(what: str) -> bool:
    """Tell whether training must go on to its end all the same."""
    return what in (*AROUND, "interrupted from outside", "full later in script")


def said_of(what: str) -> str:
    """Return what must be said of a kind of fault, as a regular expression."""
    if what in STRANGERS:
        return "was killed by signal 6 .*TensorPipe aborts when what comes to a worker's port is not its protocol"
    if what in FROM_OUTSIDE:
        name = FROM_OUTSIDE[what]
        if name is signal.SIGSTOP:
            return "worker @ was stopped by a signal"
        return _BY_SIGNAL.format(name.value, name.name)
    if what in TO_LAUNCHER:
        return "stopping after this step" if what.split()[-1] in ("interrupted", "terminated", "up") else ""
    if what in AROUND:
        return ""
    fault, place = kind_of(what)
    doing = _DOING[place]
    failed = rf"worker @ failed \({doing}, step \d+\): " if place not in _OUTSIDE else "worker @ failed"
    hangs = f"worker @ hangs: {doing}"
    if place in ("build", "start-up"):
        hangs = "worker @ (has not begun|has made no [Pp]ipeline)"
    text = _FAULTS[fault][1].replace("FAILED", failed).replace("HANGS", hangs)
    return text.replace("DOING", doing)


def of_torchrun(what: str) -> str:
    """Return what must be said of a kind of fault where torchrun starts the workers: by those, or by torchrun's table.

    Nobody of ours sees there with which signal a process ended.
    """
    if what == NODE:
        return "lost worker 2"
    _, place = kind_of(what)
    said = said_of(what)
    if what in FROM_OUTSIDE or "killed by signal" in said or "exit code 0" in said or "has ended" in said:
        return _ENDED
    if any(words in said for words in ("hangs", "has made no", "was stopped")):
        return r"everybody waits for worker @, |worker @ has (not begun|made no [Pp]ipeline)|heard of workers \[@\]"
    if "KeyboardInterrupt" in said:  # may be Ctrl-C, which nobody of ours hears there
        return "KeyboardInterrupt"
    if place in _OUTSIDE:  # a script's own errors are Python's to tell, which says nothing of an exit
        return said.replace("worker @ failed", "") + (f"|{_ENDED}" if "SystemExit" in said else "")
    return said
