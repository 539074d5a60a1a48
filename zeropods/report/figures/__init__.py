"""Every figure of a summary: one pure function of a record, with its unit and its formula."""
