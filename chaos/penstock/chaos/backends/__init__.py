"""What backends are made of: a network between processes, disks and clocks that can be broken."""
