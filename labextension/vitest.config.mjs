import { defineConfig } from 'vitest/config';

export default defineConfig({
  // What JupyterLab's own connection has to say about sockets.
  test: { onConsoleLog: () => false }
});
