"""Turn run records into rows, and rows into tables, plots and pages."""
