/**
 * The file that JupyterLab loads first: a container, in the words of webpack's module federation, by which JupyterLab gets the
 * plugins and the plugins get JupyterLab's packages. It is a script, not a module; build.mjs puts in the names.
 */

/** The file with the plugins, beside this one. */
declare const PLUGINS: string;
/** The other files that it imports, with spaces between. */
declare const IMPORTED: string;
/** The packages that the plugins import, with spaces between. */
declare const PACKAGES: string;

(() => {
  /** The packages of a page: by name, then by version, of which JupyterLab has one each. */
  type ShareScope = Record<string, Record<string, { get: () => Promise<() => unknown> }>>;

  let scope: ShareScope = {};

  // All files are fetched while JupyterLab starts, and not one after another when it asks for the plugins.
  for (const file of [PLUGINS, ...IMPORTED.split(' ')]) {
    const link = document.createElement('link');
    link.rel = 'modulepreload';
    link.href = new URL(file, (document.currentScript as HTMLScriptElement).src).href;
    document.head.append(link);
  }

  const container = {
    /** What the plugins import, by name. */
    packages: {} as Record<string, unknown>,

    init(shared: ShareScope): void {
      scope = shared;
    },

    /** The only module, `./extension`: a function that returns its exports. */
    async get(): Promise<() => object> {
      await Promise.all(PACKAGES.split(' ').map(load));
      const { default: plugins } = (await import(PLUGINS)) as { default: unknown };
      return () => ({ __esModule: true, default: plugins }); // JupyterLab writes into it
    }
  };

  async function load(name: string): Promise<void> {
    const [version] = Object.values(scope[name] ?? {});
    if (version === undefined) {
      throw new Error(`nbguard: this page has no ${name}`);
    }
    container.packages[name] = (await version.get())();
  }

  const page = globalThis as { _JUPYTERLAB?: Record<string, unknown> };
  (page._JUPYTERLAB ??= {}).nbguard = container;
})();
