"""The table of kinds: everything that a pipeline does. The colours suit colour-blind readers too (Okabe and Ito 2008).

All kinds from `G` on end a synchronous step (see `reductions.py`). Replicas give their gradients (`G`) to the owners,
which sum them (`S`); with ZeRO owners also update and give the new parameters (`P`), which replicas take (`A`). The
loss is collected towards the last stage (`C`) and distributed from there (`D`); if gradients are clipped, so are their
norms (`N`, `T`). Stages update their weights (`U`). If an update does not wait for the norm, it is validated when the
norm arrives (`V`).
"""

from .action import Kind

F = Kind("F", "forward", holds=1, way=1, colour="#56b4e9")
B = Kind("B", "backward", holds=-1, way=-1, accumulates=True, colour="#e69f00")
I = Kind("I", "backward for inputs", way=-1, colour="#f0e442")  # noqa: E741  the field's letter
W = Kind("W", "backward for weights", holds=-1, accumulates=True, colour="#009e73")
#: runs the forward again from its input, because the activations were not kept
R = Kind("R", "recompute", colour="#0072b2", ink="#ffffff")
#: index = part * routes + route
H = Kind("H", "hand on gradients", index="route", resource="link", colour="#8c510a", ink="#ffffff")
#: index = bucket * routes + route
G = Kind("G", "reduce-scatter: send gradients", index="route", resource="link", colour="#d55e00")
S = Kind("S", "reduce-scatter: sum gradients", index="route", resource="link", colour="#a84300", ink="#ffffff")
P = Kind("P", "all-gather: send parameters", index="route", resource="link", colour="#f4a582")
A = Kind("A", "all-gather: receive parameters", index="route", resource="link", colour="#fbd3c0")
#: in an asynchronous stream the index of an update counts the updates
U = Kind("U", "update", index="route", colour="#cc79a7")
C = Kind("C", "collect the loss", index="route", resource="control")
D = Kind("D", "distribute the loss", index="route", resource="control")
N = Kind("N", "collect norms of gradients", index="route", resource="control")
T = Kind("T", "distribute the norm", index="route", resource="control")
V = Kind("V", "validate the update", index="route", resource="control")

#: the rows that every process has; the code of a schedule may add rows
BUILT_IN = Kind.all()
