"""One script per figure: `python -m bench.NAME [--out FILE]`; `_report` is the convention."""
