"""One authenticated connection between a pod and its master."""
