"""The metadata quorum: the cluster's state, the Raft engine that orders it, its service."""
