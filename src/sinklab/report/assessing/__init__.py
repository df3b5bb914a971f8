"""What the report shows of an assessment: a table of everything that was done, and a figure for each part."""
