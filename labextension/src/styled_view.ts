/** The view with its style, which comes into the page with it. */

import css from '../style/view.css';
import { addStyle } from './style';

export { View } from './view/view';

addStyle(css);
export { OtherNotebooks } from './others';
