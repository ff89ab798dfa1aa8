"""The style sheet of the report page: inline, no fonts from elsewhere, light and dark, phones."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1f23; --muted: #5f6670;
  --line: #dfe3e8; --soft: #f5f6f8; --accent: #0b6aa8; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --muted: #a3abb5;
  --line: #2f353c; --soft: #1d2126; --accent: #6cbcf0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 50rem; background: var(--paper);
  color: var(--ink); font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; text-wrap: pretty; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 0.4rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.8rem 0 0.7rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 0.5rem; }
p { margin: 0.6rem 0; max-width: 42rem; }
.lead, .note, figcaption, dt { color: var(--muted); }
.note, figcaption { font-size: 0.92rem; line-height: 1.5; }
.alert { border-left: 4px solid #d55e00; background: var(--soft); padding: 0.6rem 0.9rem; }
code, pre, samp { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: 0.87em; }
code { background: var(--soft); border-radius: 4px; padding: 0.1em 0.35em;
  overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: 8px; margin: 0; padding: 0.8rem 1rem;
  line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 0.95rem; line-height: 1.35; }
th, td { padding: 0.5rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: bottom; }
.scroll { overflow-x: auto; }
.comparison td, .comparison tbody th { white-space: nowrap; }
.settings td { overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-size: 0.84rem; font-weight: 600; color: var(--muted); overflow-wrap: normal; }
tbody th { font-weight: 600; }
table.settings td, table.settings th { text-align: left; }
figure { margin: 1.4rem 0 2rem; }
figure img { display: block; width: 100%; height: auto; border: 1px solid var(--line);
  border-radius: 8px; }
figcaption { margin-top: 0.5rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.pair h4 { margin: 0 0 0.35rem; font-size: 0.84rem; color: var(--muted); font-weight: 600; }
li { margin: 0.5rem 0; }
details { border-top: 1px solid var(--line); padding: 0.6rem 0; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 0.6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.2rem; margin: 0.6rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 40rem) {
  body { padding: 1.5rem 1rem 3rem; font-size: 1rem; }
  h1 { font-size: 1.55rem; }
  .pair { grid-template-columns: 1fr; }
  table.comparison thead { position: absolute; clip-path: inset(50%); height: 1px;
    overflow: hidden; }
  table.comparison tr { display: block; padding: 0.7rem 0; border-bottom: 1px solid var(--line); }
  table.comparison th, table.comparison td { display: flex; justify-content: space-between;
    gap: 1rem; border: 0; padding: 0.12rem 0; }
  table.comparison th { font-size: 1.05rem; }
  table.comparison td::before { content: attr(data-label); color: var(--muted); }
  figure { margin-left: -0.5rem; margin-right: -0.5rem; }
}
@media print { body { max-width: none; } details > pre { display: block; } }
"""
