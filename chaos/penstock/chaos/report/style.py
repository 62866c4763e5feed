"""The style sheet of the report: light and dark, as the reader's system has it."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --paper:#fff; --ground:#f5f6f8; --ink:#1b2430; --soft:#5b6775; --rule:#dfe3e8;
  --written:#2563eb; --read:#0d9488; --p99:#d97706; --p999:#be185d; --good:#15803d; --bad:#dc2626;
  --doubt:#b45309; --up:#86d1a3; --fault:rgba(217,119,6,.13); --edge:rgba(180,83,9,.55); }
@media (prefers-color-scheme: dark) { :root { --paper:#161b22; --ground:#0d1117; --ink:#e6edf3;
  --soft:#9aa7b4; --rule:#2c343e; --written:#6ea8fe; --read:#3fc6b7; --p99:#f0a63c; --p999:#f472b6;
  --good:#4ade80; --bad:#f87171; --doubt:#fbbf24; --up:#2f6b47; --fault:rgba(240,166,60,.14);
  --edge:rgba(240,166,60,.6); } }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:1120px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:24px; margin:0; letter-spacing:-.01em; }
h2 { font-size:17px; margin:0 0 4px; }
p { margin:4px 0; } .soft { color:var(--soft); } .small { font-size:13px; }
section, header { background:var(--paper); border:1px solid var(--rule); border-radius:10px;
  padding:18px 20px; margin:0 0 16px; overflow-x:auto; }
header .top { display:flex; gap:14px; align-items:center; flex-wrap:wrap; }
.verdict { font-weight:650; border-radius:999px; padding:3px 14px; border:1.5px solid currentColor;
  white-space:nowrap; }
.true { color:var(--good); } .false { color:var(--bad); } .unknown { color:var(--doubt); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px;
  margin-top:16px; }
.tile { border:1px solid var(--rule); border-radius:8px; padding:9px 12px; }
.tile b { display:block; font-size:20px; font-weight:620; font-variant-numeric:tabular-nums;
  letter-spacing:-.01em; }
.tile span { color:var(--soft); font-size:12.5px; }
pre, code { font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
pre { background:var(--ground); border:1px solid var(--rule); border-radius:6px; padding:9px 12px;
  margin:10px 0 0; white-space:pre-wrap; overflow-wrap:anywhere; }
svg { display:block; width:100%; min-width:640px; height:auto; }
svg text { font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif; fill:var(--soft);
  font-variant-numeric:tabular-nums; }
svg .fault-label { fill:var(--doubt); font-size:10.5px; }
.grid { stroke:var(--rule); stroke-width:1; }
.fault { fill:var(--fault); } .fault-edge { stroke:var(--edge); stroke-dasharray:3 3; }
.line { fill:none; stroke-width:1.7; stroke-linejoin:round; stroke-linecap:round; }
.written { stroke:var(--written); } .read { stroke:var(--read); }
.p50 { stroke:var(--written); } .p99 { stroke:var(--p99); } .p999 { stroke:var(--p999); }
.memory-0 { stroke:var(--written); } .memory-1 { stroke:var(--read); } .memory-2 {
  stroke:var(--p99); } .memory-3 { stroke:var(--p999); } .memory-4 { stroke:var(--good); }
.bar.failed { fill:var(--bad); } .bar.ambiguous { fill:var(--doubt); }
.up { fill:var(--up); } .down { fill:var(--bad); }
.legend { display:flex; gap:16px; flex-wrap:wrap; color:var(--soft); font-size:13px;
  margin:2px 0 6px; }
.legend i { display:inline-block; width:14px; height:3px; border-radius:2px; margin-right:6px;
  vertical-align:middle; }
.legend i.box { height:11px; width:11px; border-radius:3px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--soft); font-weight:550; border-bottom:1px solid var(--rule); }
th, td { padding:5px 12px 5px 0; vertical-align:top; } td { border-bottom:1px solid var(--rule); }
tr:last-child td { border-bottom:0; } .n { text-align:right; }
details { border-top:1px solid var(--rule); padding:8px 0; } details:first-of-type { border-top:0; }
summary { cursor:pointer; display:flex; gap:12px; align-items:baseline; }
summary .name { font-weight:600; min-width:220px; } summary .what { color:var(--soft); flex:1; }
summary .mark { font-weight:650; min-width:64px; }
.anomaly { border-left:3px solid var(--bad); padding:2px 0 2px 12px; margin:10px 0; }
.definition { color:var(--soft); max-width:90ch; white-space:pre-line; margin:6px 0 8px; }
footer { color:var(--soft); font-size:13px; padding:0 4px; }
"""
