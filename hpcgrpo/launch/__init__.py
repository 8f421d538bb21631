"""Starting a run: on this machine now (`local`), on a cluster by its queue."""
