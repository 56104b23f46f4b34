/** Who is signed in, or null. Your session goes here; this one takes a cookie at its word. */
export async function user(request: Request): Promise<string | null> {
  return /(?:^|; )user=([\w-]+)/.exec(request.headers.get("cookie") ?? "")?.[1] ?? null;
}
