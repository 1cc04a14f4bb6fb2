import eslint from '@eslint/js';
import { defineConfig } from 'eslint/config';
import tseslint from 'typescript-eslint';

const BROWSER = ['document', 'fetch', 'matchMedia', 'performance', 'postMessage', 'setInterval', 'self', 'Option', 'URL', 'Worker'];

export default defineConfig(
  { files: ['labextension/build.mjs'], languageOptions: { globals: { process: 'readonly', console: 'readonly' } }, rules: { 'no-console': 'off' } },
  {
    files: ['docs/snapshot-doctor/*.js'],
    languageOptions: {
      globals: Object.fromEntries(BROWSER.map(name => [name, 'readonly']))
    },
    rules: { eqeqeq: 'error', 'no-console': 'error' }
  },
  eslint.configs.recommended,
  {
    files: ['**/*.ts'],
    extends: [tseslint.configs.strictTypeChecked, tseslint.configs.stylisticTypeChecked],
    languageOptions: { parserOptions: { projectService: true } },
    rules: {
      '@typescript-eslint/no-explicit-any': 'error',
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      eqeqeq: 'error',
      'no-console': ['error', { allow: ['warn'] }]
    }
  }
);
