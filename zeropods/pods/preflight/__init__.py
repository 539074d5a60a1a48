"""Every pod looked at before anything is started on it."""
