"""The template of a report's page: its style, its frame, and parts that can be replaced. No scripts, no network."""

from dataclasses import dataclass

from lit_lazy.table.document import escape_html

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2128; --quiet: #57606a; --line: #d0d7de; --link: #0759b5; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --ink: #dfe4ea; --quiet: #9aa5b1; --line: #3a424c; --link: #7ab7ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2.5rem) 4rem; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; }
h2 { margin: 2.4rem 0 .8rem; padding-top: .8rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 1.6rem 0 .6rem; font-size: 1.05rem; }
p, ul, ol, dl { max-width: 85ch; }
a { color: var(--link); }
code { font: .87em ui-monospace, monospace; }
nav ol { max-width: none; margin: .8rem 0 0; padding: 0; list-style: none; }
nav li { display: inline-block; margin-right: 1.4rem; }
.lead, small, figcaption { color: var(--quiet); }
.lead { margin: .3rem 0 0; }
header .ablation-table p { font-size: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dt { grid-column: 1; font-weight: 600; }
dd { grid-column: 2; margin: 0; }
@media (max-width: 600px) { dl { display: block; } dt { margin-top: .6rem; } }
.ablation-table .grid { background:
  linear-gradient(to right, var(--page) 40%, transparent) 0 / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) 100% / 3rem 100% no-repeat local,
  linear-gradient(to right, rgba(128, 128, 128, .4), transparent) 0 / 1rem 100% no-repeat scroll,
  linear-gradient(to left, rgba(128, 128, 128, .4), transparent) 100% / 1rem 100% no-repeat scroll; }
.ablation-table .grid tr > :first-child { position: sticky; left: 0; background: var(--page); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 560px), 1fr)); gap: 1.6rem; }
figure { min-width: 0; max-width: calc(var(--width) + 2px); margin: 0; }
figure.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: #fff; }
img { display: block; width: 100%; min-width: min(var(--width), 32rem); height: auto; }
figcaption { margin-top: .4rem; font-size: .93em; }
figcaption b { color: var(--ink); }
@media (max-width: 34rem) { figcaption::before { content: "\\2194  Scrolls sideways. "; } }
details { margin: .5rem 0; padding: .4rem .6rem; border: 1px solid var(--line); border-radius: 6px; }
summary { font-weight: 600; cursor: pointer; }
details[open] > summary { margin-bottom: .6rem; }
@media print {
  :root { color-scheme: light; --page: #fff; --ink: #000; --quiet: #444; --line: #bbb; --link: #000; }
  body { font-size: 10pt; }
  nav { display: none; }
  figure, tr { break-inside: avoid; }
  img { min-width: 0; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .ablation-table table { font-size: 7pt; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p class="lead">{summary}</p>
{opening}<nav aria-label="Contents"><ol>{outline}</ol></nav>
</header>
{sections}</main>
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """A part of a page with an entry in its contents."""

    id: str
    title: str
    body: str
    heading: bool = True
    """Whether the title is shown; the table's HTML has its heading."""

    @property
    def link(self) -> str:
        """The entry in the page's contents."""
        return f'<li><a href="#{self.id}">{escape_html(self.title)}</a></li>'

    @property
    def html(self) -> str:
        heading = f"<h2>{escape_html(self.title)}</h2>\n" if self.heading else ""
        return f'<section id="{self.id}">\n{heading}{self.body}\n</section>\n'
