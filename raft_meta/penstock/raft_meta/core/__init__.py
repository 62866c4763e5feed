"""Pure: the cluster's state machine and the active controller's decisions."""
