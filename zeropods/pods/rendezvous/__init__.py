"""How pods report in: the master's listener, and the pod's side."""
