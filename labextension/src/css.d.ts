/** A style sheet that is imported is its minified text: see build.mjs. */
declare module '*.css' {
  const css: string;
  export default css;
}
