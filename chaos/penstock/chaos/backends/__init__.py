"""What backends are made of: a network between processes, and disks, that can be broken."""
