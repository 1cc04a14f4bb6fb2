/* global document */
// The minified text of index.css (`npm run build:style`), put into the page as it is: no loader has to come along.
import css from '../lib/style.raw.css';

const style = document.createElement('style');
style.textContent = css;
document.head.append(style);
