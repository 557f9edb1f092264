"""What every report has in common: its style sheet, and how to read it."""

from __future__ import annotations

CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, "Segoe UI", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 1.5rem 2rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.4rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 2px solid #1a1a1a;
     overflow-wrap: anywhere; }
h3 { font-size: 1.1rem; margin: 1.5rem 0 .3rem; }
a { color: #004a80; }
p, li { max-width: 50rem; overflow-wrap: anywhere; }
.source { color: #4a4a4a; }
.verdict { border: 1px solid #767676; border-left-width: .6rem; padding: .2rem 1rem; margin: 1rem 0; }
.verdict p { margin: .4rem 0; }
.verdict p:first-child { font-weight: 700; }
.captured { border-left-color: #007a59; border-left-style: solid; }
.skipped, .cancelled { border-left-color: #8a5f00; border-left-style: dashed; }
.oom, .crashed, .failed { border-left-color: #b34700; border-left-style: double; }
figure { margin: 1.2rem 0; }
img { display: block; max-width: 100%; height: auto; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 700; padding: .3rem 0; }
th, td { border: 1px solid #c4c4c4; padding: .25rem .6rem; text-align: right; vertical-align: top; }
thead th { background: #ececec; border-bottom: 2px solid #767676; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 600; background: #f6f6f6; }
table.pairs { margin: 1rem 0; }
table.pairs td { text-align: left; overflow-wrap: anywhere; }
div.pairs { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; }
pre { background: #f6f6f6; border: 1px solid #c4c4c4; padding: .7rem; max-height: 26rem; overflow: auto;
      font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid #004a80; }
@media print {
  main { max-width: none; padding: 0; }
  pre { max-height: none; }
  .wide { overflow: visible; }
  table { font-size: .75rem; }
  figure, tr, .verdict { break-inside: avoid; }
  h2, h3, caption { break-after: avoid; }
}
"""

HOW_TO_READ = """
<section aria-labelledby="reading">
<h2 id="reading">How to read this</h2>
<ul>
<li>GiB is 2<sup>30</sup> bytes and MiB is 2<sup>20</sup> bytes. n/a means not known; it is never a
zero.</li>
<li>A bucket is a token count (num_tokens) for which the server captures the prefill as CUDA graphs before
it takes requests. The ladder is the list of buckets. A request is padded to the nearest captured
bucket.</li>
<li>Memory: buckets are captured largest first, so read the cumulative line from right to left. Where all
buckets share one pool, the first pays for it and later ones add little.</li>
<li>The old gate is the 4.00 GiB rule of SGLang 0.5.16 and 0.5.17: with less memory free before the
capture, an automatically chosen prefill graph was skipped. It exists no more; the line is there for
comparison.</li>
<li>Time: warm-up is an eager pass before the capture of a bucket. The bucket captured first also pays for
what is done only once, such as compilation.</li>
<li>Replay against eager compares full buckets, in interleaved pairs. A request that needs padding gains
less. Padding is the share of a bucket's rows that a replay computes for nothing, over the token counts the bucket
serves, each counting the same; a request under half of its bucket runs eager instead and does not count.</li>
<li>cpu (accounted): the CPU device records and replays the same calls, and its times are real CPU times.
Its memory is accounted by a model of the CUDA caching allocator against a declared capacity. None of it
tells how fast a GPU would be.</li>
<li>Peak is the most that was in use during the capture, less what was in use before it. It can exceed
what is left in use afterwards.</li>
</ul>
</section>
"""
