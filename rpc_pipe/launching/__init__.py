"""Starting the processes of a job, and their messages to the launcher."""

#: the interface of a host to itself
LOOPBACK = "lo"
#: order of the launcher to a worker: finish the step and stop
STOP = b"s"
