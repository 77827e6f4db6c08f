"""Starting the processes of a job, and what they tell whoever started them."""

#: the interface of a host to itself
LOOPBACK = "lo"
