"""What a run reached: summary, and one self-contained web page. page.html, page.css and page.js are its parts."""
