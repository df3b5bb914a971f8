"""Reports on results: the HTML page, chart files, packed sweeps, and tables for the page, terminal and notebooks.

Altair and vl-convert are imported only by `page` and the modules that draw charts. Reading results (`collect`),
aggregating them (`cells`) and making tables (`result_tables`, `sweeps`) do not need them.
"""
