"""Starting the processes of a job, and their messages to the launcher."""

#: the interface of a host to itself
LOOPBACK = "lo"
#: order of the launcher to a worker: finish the step and stop
STOP = b"s"
#: seconds between looks at a launcher or a stop that ends, and for last words about its cause
LOOK_EVERY_S, LAST_WORDS_S = 0.1, 2.0
