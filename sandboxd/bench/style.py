"""How the bench's page looks: light and dark as the reader's system is, from a phone's width up."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --card: #ffffff; --text: #1d1f23; --faint: #646a73;
  --line: #e3e4e0; --c0: #2563c9; --c1: #c2570c; --c2: #0f8a5f; --c3: #7c4fc4; --c4: #c0334a; --c5: #0b7f92;
  --c6: #7a7412; --c7: #b03d86; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171a; --card: #1d2024; --text: #e8e8e4;
  --faint: #a0a6ae; --line: #33373d; --c0: #74a7ff; --c1: #f2994a; --c2: #4cc796; --c3: #b79aef;
  --c4: #ff7f8f; --c5: #4fc3d6; --c6: #cfc65a; --c7: #ee8fca; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 10px; }
.host, .none, figcaption { color: var(--faint); }
.host { margin: 0; font-size: .9rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; max-width: 640px; }
figcaption { font-size: .9rem; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; font: 14px system-ui, sans-serif; }
.tick, .label { fill: var(--faint); }
.grid { stroke: var(--line); stroke-width: 1; }
.base { stroke: var(--faint); stroke-width: 1; }
.line { fill: none !important; stroke-width: 2; stroke-linejoin: round; }
.line.dashed { stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none; padding: 0; margin: 0 0 6px;
  font-size: .85rem; }
.key { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
.key.dashed { background: repeating-linear-gradient(90deg, var(--own) 0 4px, transparent 4px 7px); }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); } .c3 { --own: var(--c3); }
.c4 { --own: var(--c4); } .c5 { --own: var(--c5); } .c6 { --own: var(--c6); } .c7 { --own: var(--c7); }
rect[class^=c], circle { fill: var(--own); }
.line { stroke: var(--own); }
.key { background: var(--own); }
details { margin-top: 14px; }
details > figure, details > .plots, details > .wide { margin-top: 10px; }
summary { cursor: pointer; padding: 6px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
li { overflow-wrap: anywhere; }
"""
