import './base.css';
import './view.css';
