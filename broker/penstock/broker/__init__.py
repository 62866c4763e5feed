"""The broker: partition logs, replication, coordinators and the services over them."""
