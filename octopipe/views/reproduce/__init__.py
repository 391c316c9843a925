"""The paper's tables and figures computed again with our own code, with our values beside the paper's.

Knows: the contents of this package. Does not know: any one table. `octopipe reproduce` is its verb.

    reading.py, models.py   what the paper leaves open and how we read it; its models and the authors' layer times
    row.py, part.py         a claim with its verdict; a table or figure
    bench.py, runner.py     costs, baselines, searches stored on disk; parts run, stored and written
    parts/                  one file per table or figure
"""
