"""What this machine has: memory within its limits, disks that read past the page cache, GPUs."""
