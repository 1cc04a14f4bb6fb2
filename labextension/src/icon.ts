import { LabIcon } from '@jupyterlab/ui-components';

/** A memory module with a bar that is half full. */
const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3 jp-icon-selectable" fill="#616161" d="M7 2h2v3h2V2h2v3h2V2h2v3h1a2 2 0 0 1 2 2v1h3v2h-3v2h3v2h-3v2h3v2h-3v0a2 2 0 0 1-2 2h-1v3h-2v-3h-2v3h-2v-3H9v3H7v-3H6a2 2 0 0 1-2-2H1v-2h3v-2H1v-2h3v-2H1V8h3V7a2 2 0 0 1 2-2h1zM6 7v11h12V7zm2 6h8v3H8z"/>
</svg>`;

export const memoryIcon = new LabIcon({ name: 'nbguard:memory', svgstr: SVG });
