"""Transactions in the simulated cluster: what clients and brokers do, and what must hold."""
