"use strict";

const root = new URL(".", location.href).href; // with the route prefix of the server

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  displayRequestDuration: true,
  // The default validator is a service on the internet, which would get the document's address.
  validatorUrl: null,
  // The document names no server, so Swagger UI sends requests to the root of the host.
  requestInterceptor(request) {
    if (!request.loadSpec) request.url = request.url.replace(`${location.origin}/`, root);
    return request;
  },
});
