"""Where pods come from: processes of this machine, CML's workers, or the user's own hosts."""
