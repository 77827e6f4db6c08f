"""The table of kinds: everything that a pipeline does. The colours suit colour-blind readers too (Okabe and Ito 2008).

The last seven kinds end a synchronous step (see `reductions.py`). Replicas exchange their gradients (`G`). The loss is
collected towards the last stage (`C`) and distributed from there (`D`); if gradients are clipped, so are their norms
(`N`, `T`). Stages update their weights (`U`). If an update does not wait for the norm, it is validated when the norm
arrives (`V`).
"""

from .action import Kind

F = Kind("F", "forward", holds=1, way=1, colour="#56b4e9")
B = Kind("B", "backward", holds=-1, way=-1, accumulates=True, colour="#e69f00")
I = Kind("I", "backward for inputs", way=-1, colour="#f0e442")  # noqa: E741  the field's letter
W = Kind("W", "backward for weights", holds=-1, accumulates=True, colour="#009e73")
#: runs the forward again from its input, because the activations were not kept
R = Kind("R", "recompute", colour="#0072b2", ink="#ffffff")
G = Kind("G", "gradient exchange", index="route", colour="#d55e00")
#: in an asynchronous stream the index of an update counts the updates
U = Kind("U", "update", index="route", colour="#cc79a7")
C = Kind("C", "collect the loss", index="route", resource="link")
D = Kind("D", "distribute the loss", index="route", resource="link")
N = Kind("N", "collect norms of gradients", index="route", resource="link")
T = Kind("T", "distribute the norm", index="route", resource="link")
V = Kind("V", "validate the update", index="route", resource="link")

#: the rows that every process has; the code of a schedule may add others
BUILT_IN = Kind.all()
