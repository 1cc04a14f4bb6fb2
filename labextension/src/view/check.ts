/** Checks of values that come from a kernel, put together by protocol.ts: a value is what its type says, or is dropped. */

export type Check<T> = (value: unknown) => value is T;

type Checked<C> = C extends Check<infer T> ? T : never;

export const text: Check<string> = value => typeof value === 'string';
export const number: Check<number> = (value): value is number => Number.isFinite(value);
export const boolean: Check<boolean> = value => typeof value === 'boolean';

export function oneOf<const T extends string>(...expected: T[]): Check<T> {
  return (value): value is T => expected.includes(value as T);
}

export function nullable<T>(check: Check<T>): Check<T | null> {
  return (value): value is T | null => value === null || check(value);
}

export function list<T>(check: Check<T>): Check<T[]> {
  return (value): value is T[] => Array.isArray(value) && value.every(check);
}

/** A list with a check for each of its items. */
export function tuple<const C extends Check<unknown>[]>(...checks: C): Check<{ [K in keyof C]: Checked<C[K]> }> {
  return (value): value is { [K in keyof C]: Checked<C[K]> } =>
    Array.isArray(value) && value.length === checks.length && checks.every((check, i) => check(value[i]));
}

/** An object with these fields. It may have more: a newer kernel of the same protocol may send them. */
export function object<T>(checks: { [K in keyof T]: Check<T[K]> }): Check<T> {
  const fields = Object.entries<Check<unknown>>(checks);
  return (value): value is T => isObject(value) && fields.every(([name, check]) => check(value[name]));
}

/** An object whose `op` says which check the rest of it must pass. */
export function variants<T extends { op: string }>(checks: {
  [K in T['op']]: Check<Omit<Extract<T, { op: K }>, 'op'>>;
}): Check<T> {
  const byOp = new Map<unknown, Check<unknown>>(Object.entries<Check<unknown>>(checks));
  return (value): value is T => isObject(value) && byOp.get(value.op)?.(value) === true;
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
