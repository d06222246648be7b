"""A run as one self-contained web page. `compose.write` makes it; page.html, page.css and page.js are its parts."""
