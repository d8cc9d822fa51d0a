"""The looks of a report's page and of its figures."""

_COLOURS = """
:root { --paper: #fff; --ink: #1c2127; --muted: #667080; --grid: #e3e6ea; --stripe: #f6f7f9;
  --series0: #2f6fb5; --series1: #c4501b; --series2: #2b8a4b; --series3: #8a4fbf;
  --series4: #b8860b; --series5: #c03a72; --series6: #14868c; --series7: #77808c; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e4e7eb; --muted: #98a2af; --grid: #2d333b;
  --stripe: #1b1f25; --series0: #6cabf0; --series1: #f08a5a; --series2: #5cc682; --series3: #bd8df0;
  --series4: #e0b040; --series5: #ee7fae; --series6: #4cc3c9; --series7: #8d97a4; } }
"""
# A figure in a file of its own.
PICTURE = f"""{_COLOURS}svg {{ background: var(--paper); }}
text {{ paint-order: stroke; stroke: var(--paper); stroke-width: 2.5px; stroke-linejoin: round; }}
"""
_REST = """* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1600px; margin: 0 auto; padding: 1rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; margin: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p, ul, dd { max-width: 75ch; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .8rem 0; }
td, th { padding: .35rem .5rem; text-align: right; vertical-align: top; font-weight: normal; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; white-space: normal; color: var(--muted); border-bottom: 2px solid var(--grid); }
thead .groups td { color: var(--muted); font-size: .78rem; text-align: center; padding-bottom: 0; }
thead .groups td + td { border-bottom: 1px solid var(--grid); }
tbody tr { border-bottom: 1px solid var(--grid); }
tbody tr:nth-child(even), tbody tr:nth-child(even) th { background: var(--stripe); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tbody th { font-weight: 600; max-width: 24rem; white-space: normal; overflow-wrap: anywhere; min-width: 13rem; }
th:nth-child(2), .kind { text-align: left; }
.lossless { color: var(--series2); } .own_target { color: var(--series0); } .lossy { color: var(--series1); }
small { display: block; color: var(--muted); font-size: .78rem; font-weight: normal; line-height: 1.3; }
figure { margin: 0; }
figure svg { display: block; width: 100%; min-width: 620px; max-width: 820px; height: auto; }
figure svg text { paint-order: stroke; stroke: var(--paper); stroke-width: 2.5px; stroke-linejoin: round; }
figcaption { color: var(--muted); font-size: .85rem; max-width: 85ch; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; font-size: .88rem; }
dt { font-weight: 600; } dd { margin: 0; }
code { font-size: .9em; }
@media (max-width: 640px) { main { padding: .5rem .75rem 2rem; } dl { display: block; } dd { margin: 0 0 .5rem; }
  tbody th { max-width: 10rem; min-width: 9rem; } td, th { padding: .3rem .45rem; } }
@media print { .wide { overflow: visible; } }
"""
STYLE = _COLOURS + _REST
