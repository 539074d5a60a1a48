"""Records to rows to tables, plots and pages."""
