"""The table of kinds: all that is done in a pipeline. Colours are told apart by colour-blind eyes too
(Okabe and Ito 2008).

The last seven end a synchronous step: gradients of replicas are exchanged (`G`), the loss and, if gradients are
clipped, their norms are collected towards the last stage (`C`, `N`) and what follows is told to everybody (`D`, `T`),
and weights are updated (`U`), which may be before the norm is told, and is validated then (`V`): see `ending.py`.
"""

from .action import Kind

F = Kind("F", "forward", holds=1, way=1, colour="#56b4e9")
B = Kind("B", "backward", holds=-1, way=-1, accumulates=True, colour="#e69f00")
I = Kind("I", "backward for inputs", way=-1, colour="#f0e442")  # noqa: E741  the field's letter
W = Kind("W", "backward for weights", holds=-1, accumulates=True, colour="#009e73")
#: forward once more, from the kept input, because the activations were not kept
R = Kind("R", "recompute", colour="#0072b2", ink="#ffffff")
G = Kind("G", "gradient exchange", index="route", colour="#d55e00")
#: in a stream whose updates are overtaken its index counts the updates
U = Kind("U", "update", index="route", colour="#cc79a7")
C = Kind("C", "collect the loss", index="route", resource="link")
D = Kind("D", "tell the loss", index="route", resource="link")
N = Kind("N", "collect norms of gradients", index="route", resource="link")
T = Kind("T", "tell the norm", index="route", resource="link")
V = Kind("V", "validate the update", index="route", resource="link")

#: the rows that every process has; others are made by the code of one schedule
BUILT_IN = Kind.all()
