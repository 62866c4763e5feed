"""The rules of Raft that the engine does not keep by itself, one module a section of the paper.

Each is a state machine over what they share (desk); penstock.raft_meta.guard puts them together.
"""
