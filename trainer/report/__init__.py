"""Results of a run: a summary, and one self-contained web page built from page.html,
page.css and page.js.
"""
