"""What runs on a pod: it starts sshd, holds leases, and ends what runs under it."""
