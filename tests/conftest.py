"""What every test needs."""

import signal

# A shell without job control lets what it starts in the background ignore Ctrl-C, and so all that this starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
