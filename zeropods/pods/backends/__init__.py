"""Where pods come from: processes of this machine, CML's workers, hosts of the user's own."""
