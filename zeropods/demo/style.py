"""How the page looks: calm, light and dark, from a telephone's width up."""

CSS = """
.gradio-container { width: 100% !important; max-width: 1100px !important; margin: 0 auto !important; }
.gradio-container > main, .gradio-container > main > .wrap, .gradio-container .contain { width: 100% !important; }
#zp-model input, #zp-other input, #zp-table input { padding-right: 2.2em; text-overflow: ellipsis; }
#zp-upload > button { text-align: left; }
#zp-examples td, #zp-examples th { text-align: left !important; }
#zp-examples td div { overflow-wrap: anywhere; text-align: left; }
#zp-preview, #zp-answer { padding: 0 !important; }
.zp { --zp-column: #cfe4ff; --zp-aggregate: #ffe2b8; --zp-condition: #d5f0d3; --zp-ink: #17202a;
      --zp-line: var(--border-color-primary); --zp-good: #0a6b2d; --zp-bad: #a11226; color: var(--body-text-color); }
.dark .zp { --zp-column: #1d4a7d; --zp-aggregate: #714709; --zp-condition: #1f5a2c; --zp-ink: #ffffff;
      --zp-good: #7fdc9a; --zp-bad: #ff9aa5; }
.zp p { margin: 0 0 .5em; overflow-wrap: anywhere; }
.zp mark { color: var(--zp-ink); padding: .1em .35em; border-radius: .3em; }
.zp .zp-column { background: var(--zp-column); color: var(--zp-ink); }
.zp .zp-aggregate { background: var(--zp-aggregate); }
.zp .zp-condition { background: var(--zp-condition); color: var(--zp-ink); }
.zp .zp-sql { display: block; font-size: 1.05em; line-height: 1.9; overflow-wrap: anywhere; white-space: normal;
      background: none; padding: 0; border: 0; }
.zp .zp-question { font-size: 1.1em; font-weight: 600; max-height: 6em; overflow: auto; }
.zp .zp-legend { font-size: .85em; }
.zp .zp-cards { display: grid; gap: 1em; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.zp .zp-card { border: 1px solid var(--zp-line); border-radius: .5em; padding: 1em; min-width: 0;
      background: var(--block-background-fill); }
.zp .zp-card h3 { font-size: .9em; margin: 0 0 .6em; font-weight: 600; opacity: .8; overflow-wrap: anywhere; }
.zp .zp-answer { font-size: 1.5em; font-weight: 600; margin: .4em 0; }
.zp .zp-expected { border-left: 3px solid var(--zp-line); padding-left: .8em; margin: .6em 0; font-size: .92em; }
.zp .zp-right { color: var(--zp-good); }
.zp .zp-wrong { color: var(--zp-bad); }
.zp .zp-time { font-size: .85em; opacity: .8; margin: .6em 0 0; }
.zp .zp-message { border-left: 4px solid var(--zp-bad); padding: .6em .9em; background: var(--block-background-fill); }
.zp .zp-scroll { overflow-x: auto; }
.zp .zp-scroll + p { margin-top: .6em; }
.zp table { border-collapse: collapse; font-size: .88em; margin: 0; width: auto; }
.zp th, .zp td { border: 1px solid var(--zp-line); padding: .3em .6em; text-align: left; vertical-align: top;
      max-width: 22em; overflow-wrap: break-word; }
"""
